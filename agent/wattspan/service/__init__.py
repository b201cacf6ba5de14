"""The running agent: threads, loops, assembly and installation of the services."""
