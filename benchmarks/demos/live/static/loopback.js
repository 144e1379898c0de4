// What stands in for the extension here: the calls of attribution.js go to the device agent on this machine, and so does
// the Save-Impression header of a response to a page's own fetch. What comes with a page itself only a real browser could see.
"use strict";

(() => {
  const agent = document.querySelector('meta[name="trefoil-agent"]').content;
  const request = window.fetch.bind(window);
  const methods = { save: "saveImpression", measure: "measureConversion" };

  async function post(method, passed) {
    const headers = { "Content-Type": "application/json" };
    const response = await request(`${agent}/${method}`, { method: "POST", headers, body: JSON.stringify(passed), credentials: "omit" });
    return response.json();
  }
  const bytesOf = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  async function answerTo(kind, options) {
    try {
      const { error, message, report } = await post(methods[kind], options);
      if (error !== undefined) return { error, message };
      return report === undefined ? {} : { report: bytesOf(report).buffer };
    } catch {
      return { error: "OperationError", message: "The device cannot be reached." };
    }
  }
  globalThis.__trefoil = { services: ["trefoil"], call: (kind, options, done) => answerTo(kind, options).then(done) };

  window.fetch = async (...passed) => {
    const response = await request(...passed);
    const saveImpression = response.headers.get("Save-Impression");
    if (saveImpression !== null) await post("responseHeaders", { saveImpression });
    return response;
  };
})();
