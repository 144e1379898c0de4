// What the site in this tab has asked, what that has cost, and one switch. Everything is asked of the device when the
// popup opens, and nothing is kept.
"use strict";

const MICROS = 1_000_000;
const element = (id) => document.getElementById(id);
const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
const epsilon = (micros) => `${Number((micros / MICROS).toFixed(3))}\u00a0ε`;

function showBudget(bar, words, spent, capacity) {
  const amount = document.createElement("strong");
  amount.textContent = epsilon(spent);
  element(words).replaceChildren(amount, ` of ${epsilon(capacity)} spent this week`);
  const filled = element(bar).querySelector(".spent");
  filled.setAttribute("width", String(Math.min(100, (100 * spent) / capacity)));
  filled.classList.toggle("full", spent >= capacity);
}

function factsOf(overview) {
  if (overview.site === null) return ["only pages with an https address can measure"];
  return [
    overview.ads ? `had ${plural(overview.ads, "ad")} remembered` : "has had no ad remembered",
    overview.reports ? `got ${plural(overview.reports, "sealed report")}` : "got no report",
    ...(overview.callers.length ? [`through ${overview.callers.join(", ")}`] : []),
  ];
}

function show(overview) {
  element("state").textContent = overview.enabled ? "On" : "Off";
  element("state").className = `pill ${overview.enabled ? "on" : "off"}`;
  element("switch").setAttribute("aria-checked", String(overview.enabled));
  element("switch-words").textContent = overview.enabled
    ? "Ads are remembered on this device alone. Sites get sealed reports."
    : "Nothing is remembered, and every report is empty. No site can tell.";
  element("site").textContent = overview.site ?? "This page is no site";
  const items = factsOf(overview).map((text) => Object.assign(document.createElement("li"), { textContent: text }));
  element("facts").replaceChildren(...items);
  showBudget("spent", "spent-words", overview.spent, overview.capacity);
  showBudget("all", "all-words", overview.spentByAll, overview.capacityOfAll);
  for (const id of ["here", "everyone", "controls"]) element(id).hidden = false;
  for (const id of ["spent", "spent-words"]) element(id).toggleAttribute("hidden", overview.site === null);
}

async function refresh() {
  const [tab] = await chrome.tabs.query({ active: true, currentWindow: true });
  const origin = URL.canParse(tab?.url ?? "") ? new URL(tab.url).origin : "";
  const overview = await chrome.runtime.sendMessage({ kind: "overview", origin });
  const reached = overview !== undefined && overview.error === undefined;
  element("unreachable").hidden = reached;
  if (reached) show(overview);
  else element("state").textContent = "No device";
}

element("switch").addEventListener("click", async () => {
  await chrome.runtime.sendMessage({ kind: "switch", on: element("switch").getAttribute("aria-checked") !== "true" });
  await refresh();
});
element("dashboard").addEventListener("click", (event) => {
  event.preventDefault();
  chrome.runtime.openOptionsPage();
  close();
});
refresh();
