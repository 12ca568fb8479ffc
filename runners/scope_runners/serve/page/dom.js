/** Invariant: text from the server is only ever set as text, never as markup. */

export const byId = (id) => document.getElementById(id);

/** An element with `properties` and children (text or elements; null is left out). */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role" || name === "for") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** Sets text only where it changed, so that a live region speaks once. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A chunk's index or an epoch; the API has -1 where none is known. */
export const isKnown = (index) => index !== null && index !== undefined && index >= 0;

export const seconds = (ms) => (ms < 995 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let k = 0;
  for (; count >= 1024 && k < units.length - 1; k++) count /= 1024;
  return `${count.toFixed(count < 10 && k ? 1 : 0)} ${units[k]}`;
}
