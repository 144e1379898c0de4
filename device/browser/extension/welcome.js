// Opened once, after installation: the person's own choice.
"use strict";

const element = (id) => document.getElementById(id);
const ask = async (message) => (await chrome.runtime.sendMessage(message)) ?? { error: "OperationError" };

function outcomeOf(answer) {
  if (answer.error !== undefined) return "Your device does not answer. In a terminal, run: trefoil browser status";
  return answer.enabled ? "Measurement is on. The leaf in the toolbar shows what each site asks." : "Measurement is off. No site can tell.";
}
async function choose(on) {
  const answer = await ask({ kind: "switch", on });
  element("outcome").textContent = outcomeOf(answer);
  element("outcome").classList.toggle("warn", answer.error !== undefined);
  element("outcome").hidden = false;
}
element("on").addEventListener("click", () => choose(true));
element("off").addEventListener("click", () => choose(false));
ask({ kind: "overview", origin: "" }).then((overview) => {
  const services = overview.services ?? [];
  element("services").textContent = services.length ? services.join(", ") : "no helpers yet (trefoil browser install --helpers)";
});
