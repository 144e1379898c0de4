// The way from the page's object to the extension's own world: one message port, handed over before the page's first
// script runs. A page that gets hold of it can make claims, as it can by calling.
"use strict";

(() => {
  if (!isSecureContext) return;
  // As they were before the page's first script.
  const { apply } = Reflect;
  const post = MessagePort.prototype.postMessage;
  const dataOf = Object.getOwnPropertyDescriptor(MessageEvent.prototype, "data").get;

  const { port1: ours, port2: theirs } = new MessageChannel();
  const waiting = { __proto__: null };
  let last = 0;
  ours.onmessage = (event) => {
    const answer = apply(dataOf, event, []);
    const done = waiting[answer.id];
    delete waiting[answer.id];
    done(answer);
  };
  globalThis.__trefoil.call = (kind, options, done) => {
    const id = ++last;
    waiting[id] = done;
    apply(post, ours, [{ id, kind, options }]);
  };

  // Whichever of the two worlds is first: content.js cancels the offer that it takes, and no page sees a later one.
  const offer = () => {
    const taken = !document.dispatchEvent(new MessageEvent("trefoil-offer", { ports: [theirs], cancelable: true }));
    if (taken) document.removeEventListener("trefoil-ready", offer);
  };
  document.addEventListener("trefoil-ready", offer);
  offer();
})();
