"""Uids of the dashboards, for links between them."""

FLEET = "wattspan-fleet"
HOST = "wattspan-host"
PROCESSES = "wattspan-processes"
GPUS = "wattspan-gpus"
SPANS = "wattspan-spans"
AUTOTUNER = "wattspan-autotuner"

TITLES = {
    FLEET: "Fleet",
    HOST: "Host",
    PROCESSES: "Processes and containers",
    GPUS: "GPUs",
    SPANS: "Spans",
    AUTOTUNER: "Autotuner",
}
