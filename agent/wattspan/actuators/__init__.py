"""The knobs of devices: one file a family. Each knows its range and reads back what it wrote."""
