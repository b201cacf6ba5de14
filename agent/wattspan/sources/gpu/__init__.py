"""GPUs of any vendor: the port of a vendor's library, the session, the sampler and the usage."""
