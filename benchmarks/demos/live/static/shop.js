// A purchase: the device makes a report that this page cannot read, and the shop keeps it with the others.
"use strict";

const form = document.querySelector("#buy");
const told = document.querySelector("#told");
const failed = document.querySelector("#failed");

function hexadecimal(bytes) {
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

async function buy() {
  const [service] = navigator.attribution.aggregationServices.keys();
  const { report } = await navigator.attribution.measureConversion({
    aggregationService: service,
    histogramSize: Number(form.dataset.buckets),
    epsilon: Number(form.dataset.epsilon),
    value: 1,
    maxValue: 1,
    lookbackDays: 30,
    // Not of the standard, whose browsers ignore it: count, with noise, the reports that may be missing something.
    kappa: Number(form.dataset.kappa),
  });
  const response = await fetch("/reports", { method: "POST", body: report });
  if (!response.ok) throw new Error(await response.text());
  return report;
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const button = form.querySelector("button");
  button.disabled = true;
  failed.hidden = true;
  try {
    const report = await buy();
    told.querySelector("#size").textContent = String(report.length);
    told.querySelector("#bytes").textContent = hexadecimal(report.slice(-192));
    told.hidden = false;
    // The frame is the device's own: this page can ask it to load again, and cannot read it.
    const says = document.querySelector("#device-says");
    says.src = says.src;
    told.focus();
  } catch {
    failed.hidden = false;
  } finally {
    button.disabled = false;
  }
});
