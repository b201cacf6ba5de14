"""The way to an OTLP collector: its address, what carries requests there, what its answers mean."""
