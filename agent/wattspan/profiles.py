"""What a payer spent, and when: cumulative energy over time, in bounded memory."""
