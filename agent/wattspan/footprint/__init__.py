"""Where rates come from that are no constant: a tariff file, a server, a file with one number."""
