"""Power budgets of several hosts, over a coordination service that exists already."""
