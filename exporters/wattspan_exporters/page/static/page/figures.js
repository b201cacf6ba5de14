// Formatting of figures: three significant digits, SI prefixes.

const PREFIXES = [
  [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""], [1e-3, "m"], [1e-6, "µ"],
];
const UNKNOWN = "–";
const SPACE = "\u00a0"; // between figure and unit

/** `format` for known values, a dash for null. */
const known = (format) => (value, ...more) =>
  (value === null || value === undefined ? UNKNOWN : format(value, ...more));

/** 1234.5, "W" -> "1.23 kW"; values from 1 up to `plain` have no prefix. */
export const si = known((value, unit, plain = 1) => {
  const size = Math.abs(value);
  if (size === 0) return `0${SPACE}${unit}`;
  if (size >= 1 && size < plain) return `${digits(value)}${SPACE}${unit}`;
  const rounded = Number(size.toPrecision(3));
  const [scale, prefix] = PREFIXES.find(([limit]) => rounded >= limit) ?? PREFIXES.at(-1);
  return `${digits(value / scale)}${SPACE}${prefix}${unit}`;
});

function digits(value) {
  const size = Math.abs(value);
  const places = size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2;
  return value.toFixed(places);
}

/** A formatted figure, marked if it is a lower bound. */
export const lowerBound = (text, bounded) =>
  (bounded && text !== UNKNOWN ? `≥${SPACE}${text}` : text);

/** The power of a flow: at least that of the devices whose power is known. */
export const flowWatts = ({ watts: sum, least_watts: least }) =>
  lowerBound(watts(sum ?? least), sum === null);

/** Watts to a tenth below a hundred, whole above: the resolution of counters within seconds. */
export const watts = known((value) => {
  if (value >= 9999.5 || value < 0.05) return si(value, "W");
  return `${value.toFixed(value < 99.95 ? 1 : 0)}${SPACE}W`;
});

export const joules = (value) => si(value, "J", 1000);

/** Joules and the half-width of their range, rounded up to the last digit: "82.5 ± 0.9 mJ". */
export const estimate = known((value, halfWidth) => {
  const [text, unit] = si(value, "J").split(SPACE);
  const scale = PREFIXES.find(([, prefix]) => `${prefix}J` === unit)[0];
  const places = text.split(".")[1]?.length ?? 0;
  const wide = Math.ceil(Number(((halfWidth / scale) * 10 ** places).toFixed(6))) / 10 ** places;
  return `${text}${SPACE}±${SPACE}${wide.toFixed(places)}${SPACE}${unit}`;
});

/** Joules, marked if they are a lower bound; a lower bound of 0 is unknown. */
export const leastJoules = (value, bounded) =>
  (bounded && value === 0 ? UNKNOWN : lowerBound(joules(value), bounded));

export function share(part, whole) {
  if (part === null || !whole) return UNKNOWN;
  const percent = (100 * part) / whole;
  if (part === 0) return `0${SPACE}%`;
  if (percent > 0 && percent < 0.1) return `<${SPACE}0.1${SPACE}%`;
  return `${percent.toFixed(percent < 9.95 ? 1 : 0)}${SPACE}%`;
}

/** A fraction as a percentage with one digit; null is unknown. */
export const percent = known((fraction) => `${(100 * fraction).toFixed(1)}${SPACE}%`);

export const celsius = known((value) => `${Math.round(value)}${SPACE}°C`);

export const count = known((value) =>
  (value < 1e5 ? value.toLocaleString("en").replaceAll(",", SPACE) : si(value, "").trim()));

/** 75 -> "75 s", 3600 -> "1 h", 4500 -> "1 h 15 min". */
export const duration = known((seconds) => {
  if (seconds < 1) return si(seconds, "s");
  if (seconds < 10) return `${Number(seconds.toFixed(1))}${SPACE}s`;
  if (seconds < 99.5) return `${Math.round(seconds)}${SPACE}s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes}${SPACE}min`;
  const [hours, rest] = [Math.floor(minutes / 60), minutes % 60];
  if (hours >= 48) return `${Math.floor(hours / 24)}${SPACE}d`;
  return rest ? `${hours}${SPACE}h ${rest}${SPACE}min` : `${hours}${SPACE}h`;
});

/** Durations of calls; short ones keep their digits. */
export const seconds = (value) =>
  value !== null && value < 100 ? si(value, "s") : duration(value);

export const bytes = known((value) => `${Math.round(value / 2 ** 20)}${SPACE}MiB`);

/** An amount of money; small amounts keep two digits. */
export const money = known((value, currency) => {
  const small = Math.abs(value) > 0 && Math.abs(value) < 0.1;
  const shown = small ? Number(value.toPrecision(2)).toString() : value.toFixed(2);
  return `${shown}${SPACE}${currency}`;
});

export function clock(unix, withSeconds = false) {
  const options = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
  if (withSeconds) options.second = "2-digit";
  return new Date(unix * 1000).toLocaleTimeString("en", options);
}

/** A name of bounded length, never empty. */
export function name(text, length = 120) {
  const shown = text.trim() || "(no name)";
  return shown.length > length ? short(shown, length) : shown;
}

/** A sentence of bounded length. */
export const sentence = (text, length = 400) =>
  text.length > length ? `${text.slice(0, length - 1)}…` : text;

/** `length` characters of a name, two thirds of them from its beginning. */
export function short(text, length) {
  const tail = Math.floor((length - 1) / 3);
  return `${text.slice(0, length - 1 - tail).trimEnd()}…${text.slice(text.length - tail).trimStart()}`;
}

/** The names of kinds. */
export const TYPES = {
  gpu: "GPU", cpu: "CPU", memory: "Memory", enclosure: "Platform",
  idle: "Idle", unattributed: "Unattributed", undivided: "Counted only",
  mixed: "Several kinds",
};
