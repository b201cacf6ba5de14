"""Variable rates of cost and carbon: from a tariff file, a server, or a file with one number."""
