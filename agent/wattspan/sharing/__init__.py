"""Fair division of bounded pools among the owners that fill them."""
