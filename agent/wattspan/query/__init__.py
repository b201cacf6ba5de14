"""The agent's answers to `how much energy, by whom, between then and then`, on its Unix socket."""
