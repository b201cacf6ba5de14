"""Text, encodings, bounded file reads and isolated child processes."""
