"""The interfaces of other energy libraries, answered by the agent."""
