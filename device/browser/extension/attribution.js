// navigator.attribution as W3C Attribution Level 1 defines it, in the page's own world. Nothing here is trusted: a page
// that rewrites all of it can do what it could do by calling, and no more. Services and transport are handed over in
// `__trefoil`, by port.js in a browser with the extension and by loopback.js in the live demonstration.
"use strict";

(() => {
  const { services, call: send } = globalThis.__trefoil ?? {};
  delete globalThis.__trefoil;
  // A browser that has the API keeps its own; an insecure context has none.
  if (!send || !isSecureContext || "attribution" in Navigator.prototype) return;

  // Intrinsics as they were before the page's first script.
  const { apply, defineProperty, getOwnPropertyDescriptor, ownKeys } = Reflect;
  const { hasOwn } = Object;
  const PagePromise = Promise;
  const PageMap = Map;
  const PageBytes = Uint8Array;
  const PageException = DOMException;
  const errors = { __proto__: null, RangeError, ReferenceError, TypeError };
  const finite = Number.isFinite;
  const toWellFormed = String.prototype.toWellFormed;
  const { entries: mapEntries, get: mapGet, has: mapHas, keys: mapKeys, set: mapSet, values: mapValues } = Map.prototype;
  const { iterator, toStringTag } = Symbol;
  const userAgent = getOwnPropertyDescriptor(Navigator.prototype, "userAgent").get;
  const wrong = (message) => new errors.TypeError(message);

  // Web IDL §3.2: what a page passes becomes what the standard's dictionaries hold. No range is enforced here.
  const unsignedLong = (value) => +value >>> 0;
  const long = (value) => +value | 0;
  const double = (value) => {
    const number = +value;
    if (!finite(number)) throw wrong("The provided double value is non-finite.");
    return number;
  };
  const string = (value) => apply(toWellFormed, `${value}`, []);
  const isObject = (value) => (typeof value === "object" && value !== null) || typeof value === "function";
  const sequence = (convert) => (value) => {
    const method = isObject(value) ? value[iterator] : undefined;
    if (method === undefined || method === null) throw wrong("The provided value cannot be converted to a sequence.");
    const steps = apply(method, value, []);
    if (!isObject(steps)) throw wrong("The iterator is not an object.");
    const { next } = steps;
    const list = [];
    for (;;) {
      const step = apply(next, steps, []);
      if (!isObject(step)) throw wrong("The iterator's result is not an object.");
      if (step.done) return list;
      // Not `push` and not an assignment: the page may have put setters on Array.prototype.
      const data = { __proto__: null, value: convert(step.value), writable: true, enumerable: true, configurable: true };
      defineProperty(list, list.length, data);
    }
  };

  // Name, conversion, whether required: in lexicographical order, in which Web IDL reads them.
  const IMPRESSION = [
    ["conversionCallers", sequence(string)],
    ["conversionSites", sequence(string)],
    ["histogramIndex", unsignedLong, true],
    ["lifetimeDays", unsignedLong],
    ["matchValue", unsignedLong],
    ["priority", long],
  ];
  const CONVERSION = [
    ["aggregationService", string, true],
    ["credit", sequence(double)],
    ["epsilon", double],
    ["histogramSize", unsignedLong, true],
    ["impressionCallers", sequence(string)],
    ["impressionSites", sequence(string)],
    // Ours: the weight of the bias side query. Other browsers ignore an unknown member.
    ["kappa", unsignedLong],
    ["lookbackDays", unsignedLong],
    ["matchValues", sequence(unsignedLong)],
    ["maxValue", unsignedLong],
    ["value", unsignedLong],
  ];
  function dictionary(members, passed) {
    if (passed !== undefined && passed !== null && !isObject(passed)) throw wrong("The provided value is not an object.");
    const read = { __proto__: null };
    for (let place = 0; place < members.length; place++) {
      const { 0: name, 1: convert, 2: required } = members[place];
      const value = passed === undefined || passed === null ? undefined : passed[name];
      if (value !== undefined) read[name] = convert(value);
      else if (required) throw wrong(`Required member ${name} is undefined.`);
    }
    return read;
  }

  // Own properties only: a page that puts some on Object.prototype breaks its own calls, and no other.
  function settle(answer, resolve, reject) {
    if (hasOwn(answer, "error")) {
      const { error, message } = answer;
      reject(error in errors ? new errors[error](message) : new PageException(message, error));
    } else {
      resolve(hasOwn(answer, "report") ? { report: new PageBytes(answer.report) } : {});
    }
  }
  // A method that returns a promise does not throw: what the executor throws rejects the promise.
  const call = (kind, members, self, passed) =>
    new PagePromise((resolve, reject) => {
      if (!isAttribution(self)) throw wrong("Illegal invocation");
      if (passed.length < 1) throw wrong("1 argument required, but only 0 present.");
      const options = dictionary(members, passed[0]);
      send(kind, options, (answer) => settle(answer, resolve, reject));
    });

  const TOKEN = {};
  let isAttribution;
  class Attribution {
    #services;
    static { isAttribution = (value) => isObject(value) && #services in value; }
    constructor(token, map) {
      if (token !== TOKEN) throw wrong("Illegal constructor");
      this.#services = map;
    }
    get aggregationServices() { return this.#services; }
    saveImpression(options) { return call("save", IMPRESSION, this, arguments); }
    measureConversion(options) { return call("measure", CONVERSION, this, arguments); }
  }
  // A read-only maplike. Every value is a new dictionary, and every iterator a real Map's.
  class AttributionAggregationServices {
    #names;
    constructor(token, names) {
      if (token !== TOKEN) throw wrong("Illegal constructor");
      this.#names = names;
    }
    #map() {
      const map = new PageMap();
      const names = this.#names;
      for (let place = 0; place < names.length; place++) apply(mapSet, map, [names[place], { protocol: "trefoil" }]);
      return map;
    }
    get size() { return this.#names.length; }
    entries() { return apply(mapEntries, this.#map(), []); }
    keys() { return apply(mapKeys, this.#map(), []); }
    values() { return apply(mapValues, this.#map(), []); }
    get(name) { return apply(mapGet, this.#map(), [required(arguments, string)]); }
    has(name) { return apply(mapHas, this.#map(), [required(arguments, string)]); }
    forEach(callback) {
      required(arguments, (value) => { if (typeof value !== "function") throw wrong("The callback is not a function."); });
      const map = this.#map();
      const names = this.#names;
      for (let place = 0; place < names.length; place++) {
        apply(callback, arguments[1], [apply(mapGet, map, [names[place]]), names[place], this]);
      }
    }
  }
  function required(passed, convert) {
    if (passed.length < 1) throw wrong("1 argument required, but only 0 present.");
    return convert(passed[0]);
  }

  // An empty proxy of a function says of itself that it is native code, as the platform's functions do.
  const native = (platform) => new Proxy(platform, {});
  const attribution = new Attribution(TOKEN, new AttributionAggregationServices(TOKEN, services));
  const types = { Attribution: native(Attribution), AttributionAggregationServices: native(AttributionAggregationServices) };
  for (const name of ownKeys(types)) {
    const type = types[name];
    const { prototype } = type;
    for (const key of ownKeys(prototype)) {
      if (key === "constructor") continue;
      const descriptor = getOwnPropertyDescriptor(prototype, key);
      for (const role of ["value", "get"]) if (descriptor[role]) descriptor[role] = native(descriptor[role]);
      defineProperty(prototype, key, { ...descriptor, enumerable: true });
    }
    defineProperty(prototype, "constructor", { value: type, writable: true, enumerable: false, configurable: true });
    defineProperty(prototype, toStringTag, { value: name, configurable: true });
    defineProperty(type, "length", { value: 0, configurable: true });
    defineProperty(globalThis, name, { value: type, writable: true, enumerable: false, configurable: true });
  }
  const maplike = AttributionAggregationServices.prototype;
  defineProperty(maplike, iterator, { value: maplike.entries, writable: true, enumerable: false, configurable: true });

  // The platform's own getter throws unless `this` is a Navigator.
  const holder = { get attribution() { apply(userAgent, this, []); return attribution; } };
  const getter = native(getOwnPropertyDescriptor(holder, "attribution").get);
  defineProperty(Navigator.prototype, "attribution", { get: getter, enumerable: true, configurable: true });
})();
// Pages see the name of a script in the stack of an error, and would see the extension's address there.
//# sourceURL=attribution.js
