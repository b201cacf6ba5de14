"""What instrumented applications load: light, and nothing of the agent."""
