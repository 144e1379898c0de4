// The extension's own world in every document: it passes calls on, tells of the person's input, and knows the frames of
// its document. No page can run anything here. What a page passes is a claim all the same; who it is, the browser says.
"use strict";

(() => {
  if (!isSecureContext) return;
  const UNREACHABLE = { error: "OperationError", message: "The device cannot be reached." };
  const ACTED_MS = 1000;
  // More than the device takes of each, which then refuses it just the same.
  const MAX_ENTRIES = 100;
  const MAX_TEXT = 1024;
  const MAX_ALLOW = 4096;
  // What stands for a frame that is not found, or of which too much would have to be said.
  const FORBIDDEN = { allow: "save-impression 'none'; measure-conversion 'none'", src: null, sandboxed: true };
  // In a document that has outlived the extension, sending throws at once.
  const tell = async (message) => { try { await chrome.runtime.sendMessage(message); } catch { /* Nobody is there. */ } };

  // --- Input. No key, target or position is kept.
  // HTML's activation triggering input events. One press is a pointer event and a mouse or touch event of one time: it
  // must count once, or the second would be left over for another site.
  function isAction(event) {
    if (!event.isTrusted) return false;
    if (event.type === "keydown") return event.key !== "Escape";
    if (event.type === "pointerdown") return event.pointerType === "mouse";
    if (event.type === "pointerup") return event.pointerType !== "mouse";
    return true;
  }
  let lastAction = -1;
  let lastTold = -Infinity;
  let pending = 0;
  function tellActed() {
    lastTold = performance.now();
    clearTimeout(pending);
    pending = 0;
    tell({ kind: "acted" });
  }
  function onInput(event) {
    if (!isAction(event) || event.timeStamp === lastAction) return;
    lastAction = event.timeStamp;
    if (pending) return;
    const rest = lastTold + ACTED_MS - performance.now();
    if (rest <= 0) tellActed();
    else pending = setTimeout(tellActed, rest);
  }
  const onHide = () => pending && tellActed();
  // Adding a listener twice is harmless.
  function listen() {
    for (const type of ["keydown", "mousedown", "pointerdown", "pointerup", "touchend"]) {
      addEventListener(type, onInput, { capture: true, passive: true });
    }
    addEventListener("pagehide", onHide, { capture: true });
  }
  listen();
  // document.open() removes all listeners of the window, and puts another root element in.
  new MutationObserver(listen).observe(document, { childList: true });

  // --- Frames. This window's index in its parent, by which the parent finds its element; -1 if it has none, as in a
  // shadow tree; null at the top.
  function indexInParent() {
    if (parent === window) return null;
    for (let index = 0; index < parent.length; index++) if (parent[index] === window) return index;
    return -1;
  }
  function describe(frame) {
    const allow = frame.getAttribute("allow") ?? "";
    if (allow.length > MAX_ALLOW) return FORBIDDEN;
    const src = frame.hasAttribute("srcdoc") ? null : (frame.src || frame.data || "").slice(0, MAX_TEXT) || null;
    const sandbox = frame.getAttribute("sandbox");
    return { allow, src, sandboxed: sandbox !== null && !frame.sandbox.contains("allow-same-origin") };
  }
  function* framesInShadows(root) {
    for (const element of root.querySelectorAll("*")) {
      if (root !== document && (element.localName === "iframe" || element.localName === "frame")) yield element;
      const shadow = chrome.dom.openOrClosedShadowRoot(element);
      if (shadow) yield* framesInShadows(shadow);
    }
  }
  // All of these must allow the document in the frame: where the index does not tell which element it is, any may be.
  function containersOf(index) {
    const inDocument = () => [...document.querySelectorAll("iframe, frame, object")].filter((one) => one.contentWindow === window[index]);
    const frames = index >= 0 ? inDocument() : [...framesInShadows(document)];
    return frames.length && frames.length <= MAX_ENTRIES ? frames.map(describe) : [FORBIDDEN];
  }

  const bytesOf = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  chrome.runtime.onMessage.addListener((message, sender) => {
    if (sender.id !== chrome.runtime.id || sender.tab) return;
    // A message of its own: the browser names the sender of a message, and not that of an answer.
    if (message.kind === "speak") {
      tell({ kind: "spoken", nonce: message.nonce, place: indexInParent(), containers: containersOf(message.place) });
    }
    // From here the Origin of the request is the document's.
    if (message.kind === "deliver") {
      const body = bytesOf(message.report);
      const headers = { "Content-Type": "application/octet-stream" };
      const how = { mode: "cors", credentials: "omit", cache: "no-store", referrerPolicy: "no-referrer" };
      // Browsers refuse more than 64 KiB of a request that may outlive its document.
      fetch(message.url, { method: "POST", body, headers, ...how, keepalive: body.length < 60_000 }).catch(() => {});
    }
  });

  // --- Calls.
  const scalar = (value) => (typeof value === "string" ? value.slice(0, MAX_TEXT) : typeof value === "number" ? value : null);
  const clamp = (value) => (Array.isArray(value) ? value.slice(0, MAX_ENTRIES).map(scalar) : scalar(value));
  async function pass({ data: { id, kind, options } }) {
    let answer;
    try {
      const clamped = Object.fromEntries(Object.entries(options).slice(0, MAX_ENTRIES).map(([name, value]) => [name.slice(0, MAX_TEXT), clamp(value)]));
      const acted = navigator.userActivation.isActive;
      answer = await chrome.runtime.sendMessage({ kind: "call", call: kind, options: clamped, place: indexInParent(), acted });
    } catch {
      // The extension was removed or replaced under this document.
    }
    const { error, message, report } = answer ?? UNREACHABLE;
    if (error !== undefined) this.postMessage({ id, error, message });
    else this.postMessage(report === undefined ? { id } : { id, report: bytesOf(report).buffer });
  }
  function onOffer(event) {
    if (!event.ports?.length) return;
    event.preventDefault();
    event.ports[0].onmessage = pass;
    document.removeEventListener("load", onOffer);
  }
  // Why "load": see port.js.
  document.addEventListener("load", onOffer);
  document.dispatchEvent(new Event("load"));
})();
