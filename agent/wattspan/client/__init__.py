"""Energy by hand: windows around code, asked of the agent over its Unix socket."""
