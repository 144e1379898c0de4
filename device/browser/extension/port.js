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

  // Whichever of the two worlds is first: content.js cancels the offer that it takes, and no page sees a later one. The
  // type is "load", the one that does not go on from a document to its window: a document in a frame may have the window
  // of the empty one before it, and the page may be listening there.
  const offer = () => {
    const taken = !document.dispatchEvent(new MessageEvent("load", { ports: [theirs], cancelable: true }));
    if (taken) document.removeEventListener("load", onReady);
  };
  const onReady = (event) => { if (!event.ports) offer(); };
  document.addEventListener("load", onReady);
  offer();
})();
// Pages see the name of a script in the stack of an error, and would see the extension's address there.
//# sourceURL=port.js
