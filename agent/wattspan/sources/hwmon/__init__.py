"""Power and energy sensors of the kernel's hwmon class: ARM servers, Intel GPUs, power supplies."""
