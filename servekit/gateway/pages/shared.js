// What docs.html and playground.html both do.
const JSON_TYPE = "application/json", EVENTS = "text/event-stream";
const NPY = "application/x-npy", BINARY = "application/octet-stream";
const $ = (selector, root = document) => root.querySelector(selector);
let api = {};

/** Make an element. All text becomes text nodes: nothing from outside is ever parsed as HTML. */
function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat(9).filter(child => child != null && child !== false));
  return element;
}

/** The key or token that requests carry; the tab forgets it when it is closed. */
const credential = () => keep.get("sessionStorage", "credential") ?? "";
const authorization = () => credential() ? {authorization: `Bearer ${credential()}`} : {};

/** Ask for a key or token, and start again. */
function askWho() {
  const field = h("input", {class: "field", id: "credential", type: "password", autocomplete: "off", required: true});
  const said = credential() ? "This key or token is not accepted." : "This app asks who calls.";
  const submit = event => {
    event.preventDefault();
    keep.set("sessionStorage", "credential", field.value.trim());
    location.reload();
  };
  $("#content").replaceChildren(h("form", {class: "ask", onsubmit: submit}, h("p", {role: "status"}, said),
    h("label", {for: "credential"}, "API key or token"), field, h("button", {class: "field"}, "Go on")));
  field.focus();
  return new Promise(() => {}); // nothing else is shown
}

async function load() {
  const response = await fetch("openapi.json", {headers: authorization()});
  if (response.status === 401) return askWho();
  if (!response.ok) throw new Error(`openapi.json: status ${response.status}`);
  api = await response.json();
  return response;
}

function operations() {
  const found = [];
  for (const [path, item] of Object.entries(api.paths))
    for (const [verb, op] of Object.entries(item)) {
      const status = op.responses["202"] ? "202" : "200";
      found.push({
        ...op, path, verb: verb.toUpperCase(), ...op["x-servekit"], status,
        many: op.operationId.endsWith(".batch"), query: op.parameters.filter(p => p.in === "query"),
        takes: op.requestBody?.content ?? {}, gives: op.responses[status].content });
    }
  return found;
}

/** Fill the navigation: services, and their endpoints. */
function navigation(list, ops) {
  let service = "";
  for (const op of ops) {
    if (op.service !== service)
      list.append(h("li", {class: "group"}, service = op.service));
    const kind = op.many ? "batch" : {stream: "stream", task: "task", job: ""}[op.kind] ?? (op.verb === "GET" ? "get" : "");
    list.append(h("li", {}, h("a", {href: "#" + op.operationId},
      h("span", {}, op.endpoint), kind && h("span", {class: "kind"}, kind))));
  }
}

// ---- schemas

function resolve(schema) {
  for (let i = 0; schema?.$ref && i < 9; i++) {
    const {$ref, ...rest} = schema;
    schema = {...api.components.schemas[refName(schema)], ...rest};
  }
  return schema ?? {};
}
const refName = schema => schema.$ref?.split("/").pop();
const options = schema => schema.anyOf ?? schema.oneOf;
const isBytes = schema => schema.contentEncoding === "base64";
const isArray = schema => schema.type === "array" || [].concat(schema.type).includes("array");

/** Dtype and dims of an `Array[...]`. */
function tensor(schema) {
  const match = isArray(schema) && /^(\w+) of shape \((.*?),?\)$/.exec(schema.description ?? "");
  return match && {dtype: match[1], dims: match[2].split(", ").filter(Boolean)};
}

/** Names and schemas of the properties: the required ones first, in their order. */
function properties(schema) {
  const all = schema.properties ?? {}, required = schema.required ?? [];
  const names = [...required.filter(n => n in all), ...Object.keys(all).filter(n => !required.includes(n))];
  return names.map(name => [name, all[name], required.includes(name)]);
}

function typeText(schema) {
  if (schema.$ref) {
    const target = resolve(schema);
    return target.properties || options(target) ? refName(schema) : typeText(target);
  }
  const array = tensor(schema);
  if (array) return `${array.dtype} array (${array.dims.join(" × ") || "scalar"})`;
  if ("const" in schema) return JSON.stringify(schema.const);
  if (options(schema)) return [...new Set(options(schema).map(typeText))].join(" | ");
  if (schema.prefixItems) return `[${schema.prefixItems.map(typeText).join(", ")}]`;
  if (schema.type === "array") {
    const item = typeText(schema.items ?? {});
    return `array of ${item.includes(" | ") ? `(${item})` : item}`;
  }
  if (isBytes(schema)) return "bytes, base64";
  if (schema.type === "object" && schema.properties) return schema.title ?? "object";
  if (typeof schema.additionalProperties === "object")
    return `map of ${typeText(schema.additionalProperties)}`;
  return [schema.type ?? "any"].flat().join(" | ") + (schema.format ? `, ${schema.format}` : "");
}

/** Bounds and choices, as short texts. */
function constraints(given) {
  const s = resolve(given), found = [];
  const span = (low, high, unit) => {
    if (low == null && high == null) return;
    const text = low === high ? `${low}` : low == null ? `≤ ${high}` : high == null ? `≥ ${low}` : `${low} – ${high}`;
    found.push(text + unit);
  };
  if (s.enum) found.push(s.enum.map(v => JSON.stringify(v)).join(" | "));
  span(s.minimum, s.maximum, "");
  if (s.exclusiveMinimum != null) found.push(`> ${s.exclusiveMinimum}`);
  if (s.exclusiveMaximum != null) found.push(`< ${s.exclusiveMaximum}`);
  if (s.multipleOf != null) found.push(`multiple of ${s.multipleOf}`);
  span(s.minLength, s.maxLength, " characters");
  if (!tensor(s) && !s.prefixItems) span(s.minItems, s.maxItems, " items");
  if (s.uniqueItems) found.push("unique");
  if (s.pattern) found.push(`matches ${s.pattern}`);
  for (const part of options(s) ?? []) found.push(...constraints(part).filter(c => !c.startsWith("default")));
  if (s.default != null) found.push(`default ${JSON.stringify(s.default)}`);
  return found;
}

const FORMATS = {"date-time": "2026-01-31T12:00:00Z", date: "2026-01-31", time: "12:00:00Z", duration: "PT5S",
  uuid: "7f0c3c1e-58a8-4b1e-9d0b-0d9f6a1c2b3d", uri: "https://example.com/", email: "ada@example.com"};

/** A value that the schema takes, or undefined when it would be too large to write out. */
function example(given, depth = 0) {
  const s = resolve(given);
  if (s.default != null) return s.default;
  if ("const" in s) return s.const;
  if (s.examples?.length) return s.examples[0];
  if (s.enum) return s.enum[0];
  if (s.type === "null") return null;
  if (depth > 9) return null; // it contains itself
  const array = tensor(s);
  if (array) {
    const sizes = array.dims.filter(d => d !== "...").map(d => Number(d) || 1);
    if (sizes.reduce((a, b) => a * b, 1) > 256) return undefined;
    const leaf = array.dtype === "bool" ? false : 0;
    const nest = ([n, ...rest]) => n == null ? leaf : Array.from({length: n}, () => nest(rest));
    return nest(sizes.length ? sizes : array.dims.length ? [2] : []);
  }
  const choice = options(s)?.find(o => o.type !== "null");
  if (choice) return depth && (s.default === null || depth > 5) ? null : example(choice, depth + 1);
  if (s.prefixItems) return s.prefixItems.map(item => example(item, depth + 1));
  const type = [s.type].flat().find(t => t !== "null");
  if (type === "object") {
    const made = {};
    for (const [name, part, required] of properties(s))
      if (required || (depth < 2 && part.default !== null)) made[name] = example(part, depth + 1);
    if (!s.properties && typeof s.additionalProperties === "object" && depth < 4)
      made.key = example(s.additionalProperties, depth + 1);
    return made;
  }
  if (type === "array") {
    if (depth > 3 && !s.minItems) return [];
    const length = Math.min(Math.max(s.minItems ?? 0, 1), 16);
    return Array.from({length}, () => example(s.items ?? {}, depth + 1));
  }
  if (type === "integer" || type === "number") {
    const step = type === "integer" ? 1 : .5;
    const low = s.minimum ?? (s.exclusiveMinimum == null ? -1e9 : s.exclusiveMinimum + step / 10 ** (step < 1));
    const high = s.maximum ?? s.exclusiveMaximum ?? 1e9;
    const value = Math.min(Math.max(step, low), high);
    return s.multipleOf ? Math.ceil(value / s.multipleOf) * s.multipleOf : value;
  }
  if (type === "boolean") return false;
  if (type == null) return {};
  if (isBytes(s)) return "aGVsbG8=";
  const text = FORMATS[s.format] ?? "hello".slice(0, s.maxLength ?? 5);
  return text.padEnd(s.minLength ?? 0, ".");
}

/** JSON on several lines; what fits on a line stays on it. */
function pretty(value, indent = "") {
  if (value === undefined) return "";
  if (JSON.isRawJSON?.(value)) return value.rawJSON;
  if (value === null || typeof value !== "object") return JSON.stringify(value);
  const list = Array.isArray(value), [open, close] = list ? "[]" : "{}";
  const deeper = indent + "  ", parts = Object.entries(value).filter(([, v]) => v !== undefined)
    .map(([key, v]) => (list ? "" : JSON.stringify(key) + ": ") + pretty(v, deeper));
  const flat = open + parts.join(", ") + close;
  return flat.length < 60 && !flat.includes("\n") ? flat : `${open}\n${deeper}${parts.join(`,\n${deeper}`)}\n${indent}${close}`;
}

/** Colour JSON, Python or shell text. */
function paint(text) {
  const rule = /("(?:[^"\\\n]|\\.)*")(\s*:)?|((?<![\w:./-])-?\d+(?:\.\d+)?(?:e[-+]?\d+)?\b)|\b(true|false|null|True|False|None|from|import|with|as|for|in|print|curl|await)\b|(^#.*$)/gmi;
  const parts = [];
  let end = 0;
  for (const m of text.matchAll(rule)) {
    parts.push(text.slice(end, m.index));
    const kind = m[1] ? (m[2] ? "p" : "s") : m[3] ? "n" : m[4] ? "k" : "c";
    parts.push(h("span", {class: kind}, m[0]));
    end = m.index + m[0].length;
  }
  return [...parts, text.slice(end)];
}

const bytesText = n => n >= 2 ** 20 ? `${+(n / 2 ** 20).toFixed(1)} MiB` : n >= 1024 ? `${+(n / 1024).toFixed(1)} KiB` : `${n} bytes`;

async function copy(button, text) {
  try { await navigator.clipboard.writeText(text); button.textContent = "Copied"; }
  catch { button.textContent = "Press Ctrl+C"; }
  setTimeout(() => button.textContent = "Copy", 1500);
}

/** Keep small things in the browser's storage, where it allows that. */
const keep = {
  get(store, key) { try { return window[store].getItem("servekit." + key); } catch { return null; } },
  set(store, key, value) { try { window[store].setItem("servekit." + key, value); } catch { /* not kept */ } },
};
