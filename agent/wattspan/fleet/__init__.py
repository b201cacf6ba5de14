"""Power budgets of several hosts, on a coordination service."""
