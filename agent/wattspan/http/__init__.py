"""The agent's HTTP server: listeners on TCP and Unix sockets, limits, TLS, tokens."""
