"""The knobs of devices: one file a family. Each knows its range and reads back what it wrote.

An ActuatorError's ``trouble`` says what sort of reason it has:

- DENIED: this process may not write it; with ``locked``, nobody may until the next boot.
- ABSENT: there is no such device, or it has no such knob.
- RETRY: the device, or its driver, does not answer just now.
- MALFORMED: it took a value and shows another, or the value is none it can have.
"""
