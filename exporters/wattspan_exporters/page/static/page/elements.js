// Creation and update of elements. Every text is set as textContent, because names are external.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children; strings become text. */
export function html(name, attributes = {}, ...children) {
  return furnish(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return furnish(document.createElementNS(SVG, name), attributes, children);
}

function furnish(element, attributes, children) {
  set(element, attributes);
  element.append(...children);
  return element;
}

/** Sets attributes that differ. False removes an attribute, except ARIA's, which become "false". */
export function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    const none = value === false && !name.startsWith("aria-");
    if (value === null || value === undefined || none) element.removeAttribute(name);
    else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
  }
  return element;
}

export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
  return element;
}

/** Sets a CSS property by the object model, as the content security policy requires. */
export function style(element, property, value) {
  if (element.style.getPropertyValue(property) !== value) {
    element.style.setProperty(property, value);
  }
  return element;
}

export const byId = (id) => document.getElementById(id);

/**
 * Makes the children of `parent` those of `items`, in order: kept by key, created by `make(item)`,
 * updated by `update(element, item)`. Elements in place are not moved and so keep their focus.
 */
export function keep(parent, items, key, make, update) {
  const kept = parent.kept ?? (parent.kept = new Map());
  const present = new Set(items.map(key));
  for (const [name, element] of kept) {
    if (!present.has(name)) {
      element.remove();
      kept.delete(name);
    }
  }
  let place = parent.firstElementChild;
  for (const item of items) {
    let element = kept.get(key(item));
    if (!element) {
      element = make(item);
      kept.set(key(item), element);
    }
    if (element === place) place = place.nextElementSibling;
    else parent.insertBefore(element, place);
    update(element, item);
  }
}
