"""What the measurements of spans share: an agent, an application whose truth is known, senders."""
