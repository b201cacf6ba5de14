"""AMD GPUs: energy, status and processes through AMD SMI."""
