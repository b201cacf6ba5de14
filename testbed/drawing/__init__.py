"""The dashboards, drawn with Grafana's own components from the responses of a Prometheus."""
