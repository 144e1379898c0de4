// navigator.attribution in the standard's names and shapes, forwarded to the device agent on this machine.
// A browser that has the API would do this by itself, and no page could look in between.
"use strict";

(() => {
  const agent = document.querySelector('meta[name="trefoil-agent"]').content;
  const services = new Map([["trefoil", Object.freeze({ protocol: "trefoil" })]]);
  const request = window.fetch.bind(window);
  const errors = { RangeError, ReferenceError, TypeError };

  function thrown({ error, message }) {
    return error in errors ? new errors[error](message) : new DOMException(message, error);
  }

  async function call(method, options) {
    const response = await request(`${agent}/${method}`, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(options ?? null),
      credentials: "omit",
    });
    const answer = await response.json();
    if (!response.ok) throw thrown(answer);
    return answer;
  }

  // The API's other form: headers of a response. What comes with a page itself only a real browser could see.
  async function heed(response) {
    const saveImpression = response.headers.get("Save-Impression");
    const measureConversion = response.headers.get("Measure-Conversion");
    if (saveImpression !== null || measureConversion !== null) {
      await call("responseHeaders", { saveImpression, measureConversion });
    }
    return response;
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

  window.fetch = async (...passed) => heed(await request(...passed));
  const attribution = new Attribution();
  Object.defineProperty(Navigator.prototype, "attribution", { get: () => attribution, configurable: true });
})();
