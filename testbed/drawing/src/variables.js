// Replaces variables in titles, texts and names. (Those in queries are replaced before asking.)
const REFERENCE = /\$(?:\{([^}]+)\}|(\w+))/g;

export function replacer(variables) {
  return (text, scope) => {
    if (typeof text !== 'string') {
      return text;
    }
    return text.replace(REFERENCE, (written, braced, plain) => {
      const [name] = (braced ?? plain).split(':');
      return variables[name]?.text ?? scoped(name, scope?.__dataContext?.value) ?? written;
    });
  };
}

function scoped(name, context) {
  if (!context) {
    return undefined;
  }
  const { field, frame } = context;
  if (name === '__field.name') {
    return field.name;
  }
  if (name === '__series.name') {
    return frame.name ?? '';
  }
  const label = /^__field\.labels(?:\.(.+)|\["(.+)"\])$/.exec(name);
  return label ? (field.labels?.[label[1] ?? label[2]] ?? '') : undefined;
}
