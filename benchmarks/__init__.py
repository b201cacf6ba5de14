"""One script a claim: what the agent costs, measured beside its peers."""
