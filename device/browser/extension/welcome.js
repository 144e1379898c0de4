// Opened once, after installation: the person's own choice.
"use strict";

const element = (id) => document.getElementById(id);
const ask = async (message) => (await chrome.runtime.sendMessage(message)) ?? { error: "OperationError" };

function outcomeOf(answer) {
  if (answer.error !== undefined) return "Your device does not answer. In a terminal, run: trefoil browser status";
  return answer.enabled ? "Measurement is on. The leaf in the toolbar shows what each site asks." : "Measurement is off. No site can tell.";
}
function show(answer) {
  element("outcome").textContent = outcomeOf(answer);
  element("outcome").classList.toggle("warn", answer.error !== undefined);
  element("outcome").hidden = false;
}
function name(services) {
  element("services").textContent = services.length ? services.join(", ") : "nobody yet. In a terminal, run: trefoil browser install --helpers FILE";
}
element("on").addEventListener("click", async () => show(await ask({ kind: "switch", on: true })));
element("off").addEventListener("click", async () => show(await ask({ kind: "switch", on: false })));
ask({ kind: "overview", origin: "" }).then((overview) => {
  if (overview.error === undefined) name(overview.services);
  else show(overview);
});
