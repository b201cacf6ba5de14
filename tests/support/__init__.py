"""What the tests share: requirements, waiting, leak watching."""
