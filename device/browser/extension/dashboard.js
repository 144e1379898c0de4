// The dashboard's pages as the device renders them, without a port on this machine: the device sends each page, and
// links and forms go back to it as messages.
"use strict";

async function textOf(compressed) {
  const bytes = Uint8Array.from(atob(compressed), (character) => character.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).text();
}

async function open(path, fields) {
  const answer = await chrome.runtime.sendMessage({ kind: "page", path, fields });
  if (answer?.path !== undefined) {
    await open(answer.path);
  } else if (answer?.page !== undefined) {
    const page = new DOMParser().parseFromString(await textOf(answer.page), "text/html");
    document.title = page.title;
    document.body.replaceChildren(...page.body.childNodes);
    scrollTo(0, 0);
    document.getElementById("content")?.focus();
  } else {
    const notice = Object.assign(document.createElement("p"), { className: "notice warn", role: "alert" });
    notice.textContent = "Your device does not answer. In a terminal, run: trefoil browser status";
    document.getElementById("content").replaceChildren(document.querySelector("h1"), notice);
  }
}

addEventListener("click", (event) => {
  const href = event.target.closest("a[href]")?.getAttribute("href");
  if (!href || href.startsWith("#")) return;
  event.preventDefault();
  open(href);
});
addEventListener("submit", (event) => {
  event.preventDefault();
  open(event.target.getAttribute("action"), Object.fromEntries(new FormData(event.target)));
});
open("./");
