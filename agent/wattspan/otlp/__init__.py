"""Client of OTLP collectors: addresses, transports, the queue and spool of requests."""
