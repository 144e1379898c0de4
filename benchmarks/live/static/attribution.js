// navigator.attribution in the standard's names and shapes, forwarded to the device agent on this machine.
// A browser that has the API would do this by itself, and no page could look in between.
"use strict";

(() => {
  const agent = document.querySelector('meta[name="trefoil-agent"]').content;
  const services = new Map([["trefoil", Object.freeze({ protocol: "trefoil" })]]);
  const errors = { RangeError, ReferenceError, TypeError };

  function thrown({ error, message }) {
    return error in errors ? new errors[error](message) : new DOMException(message, error);
  }

  async function call(method, options) {
    const response = await fetch(`${agent}/${method}`, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(options ?? null),
      credentials: "omit",
    });
    const answer = await response.json();
    if (!response.ok) throw thrown(answer);
    return answer;
  }

  class Attribution {
    get aggregationServices() {
      return services;
    }

    async saveImpression(options) {
      await call("saveImpression", options);
      return {};
    }

    async measureConversion(options) {
      const { report } = await call("measureConversion", options);
      return { report: Uint8Array.from(atob(report), (character) => character.charCodeAt(0)) };
    }
  }

  const attribution = new Attribution();
  Object.defineProperty(Navigator.prototype, "attribution", { get: () => attribution, configurable: true });
})();
