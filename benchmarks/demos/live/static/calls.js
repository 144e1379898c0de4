// Show every call of navigator.attribution on this page, also from the console, and every header that does the same.
"use strict";

(() => {
  const listing = document.querySelector("#calls");
  const nothing = document.querySelector("#no-calls");
  const api = navigator.attribution && Object.getPrototypeOf(navigator.attribution);
  const request = window.fetch;

  function entry(call) {
    const item = document.createElement("li");
    const site = item.appendChild(document.createElement("b"));
    const code = item.appendChild(document.createElement("code"));
    const outcome = item.appendChild(document.createElement("span"));
    [site.textContent, code.textContent, outcome.textContent] = [listing.dataset.site, call, "…"];
    listing.prepend(item);
    nothing.hidden = true;
    while (listing.children.length > Number(listing.dataset.most)) listing.lastChild.remove();
    return outcome;
  }

  // The next page lists this call too. Awaited, as a click on an ad leaves this one at once.
  async function note(call, shown, outcome) {
    shown.textContent = outcome;
    try {
      await request("/calls", { method: "POST", body: JSON.stringify({ call, outcome }) });
    } catch {
      // The call itself is done: only the list on the next page lacks it.
    }
  }

  const written = (value) =>
    String(JSON.stringify(value, null, 1)).replace(/\s+/g, " ").replace(/"(\w+)":/g, "$1:").slice(0, 600);

  function described(result) {
    return result?.report ? `→ { report: Uint8Array(${result.report.length}) }` : "→ {}, whatever the device does with it";
  }

  function watch(name) {
    const original = api[name];
    api[name] = async function (...passed) {
      const call = `navigator.attribution.${name}(${passed.map(written).join(", ")})`;
      const shown = entry(call);
      try {
        const result = await original.apply(this, passed);
        await note(call, shown, described(result));
        return result;
      } catch (error) {
        await note(call, shown, `→ ${error.name}: ${error.message}`.slice(0, 300));
        throw error;
      }
    };
  }

  if (api) ["saveImpression", "measureConversion"].forEach(watch);
  window.fetch = async (...passed) => {
    const response = await request(...passed);
    const header = response.headers.get("Save-Impression");
    const call = `Save-Impression: ${header}`.slice(0, 600);
    if (header !== null) await note(call, entry(call), "a header of the answer: the browser heeds it, no script runs");
    return response;
  };
})();
