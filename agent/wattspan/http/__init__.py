"""The agent's own small HTTP server, for what comes over TCP and over Unix sockets."""
