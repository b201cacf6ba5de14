// Stands for the parts of Grafana's components that a picture has no use for: editors and maps.
export default function Nothing() {
  return null;
}
