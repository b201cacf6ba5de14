"""Callbacks for trainers of other packages; each module needs the extra of its name."""
