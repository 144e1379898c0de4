// Between pages and the device. It adds what the browser knows of a caller and decides nothing: the device does. It
// keeps nothing about sites except, in memory and of open tabs, policy headers and the origin that a badge is for.
"use strict";

const HOST = "org.trefoil.device";
const VERSION = 1;
// A host that is asked something and says nothing for so long is dropped.
const SILENCE_MS = 30_000;
// After a host that could not be greeted, the next is started so much later, unless the person asks.
const BACKOFF_MS = 10_000;
// What the person or a site removes is asked again so much later, and then after twice as long each time.
const RETRY_MS = 1_000;
const SPEAK_MS = 2_000;
// The host reads no longer message. Calls that wait in one tab: somewhat more than the host lets one site have.
const MAX_FRAME = 1 << 20;
const MAX_PENDING = 1_100;
const MAX_POLICY = 8_192;
const UNREACHABLE = { error: "OperationError", message: "The device cannot be reached." };
const REFUSED = { error: "NotAllowedError", message: "This document may not call." };

// --- The device: one native host as long as this worker lives. An open port keeps the worker alive.
const device = {
  port: null,
  greeted: null,
  // By id: who waits for the answer.
  pending: new Map(),
  // By tab, or null: how many ask, those included that wait for a host to be greeted.
  asking: new Map(),
  last: 0,
  notBefore: 0,
  watch: 0,

  connect() {
    if (this.port) return;
    const port = chrome.runtime.connectNative(HOST);
    this.port = port;
    port.onMessage.addListener((message) => {
      this.settle(message.id, message);
      this.listen();
    });
    port.onDisconnect.addListener(() => {
      void chrome.runtime.lastError;
      this.drop(port);
    });
    this.greeted = this.greet(port);
    this.greeted.catch(() => {});
  },

  // The watch runs from the host's last word, and ends with its port: a stale one would drop the next host.
  listen() {
    clearTimeout(this.watch);
    const { port } = this;
    if (port && this.pending.size) this.watch = setTimeout(() => { this.drop(port); port.disconnect(); }, SILENCE_MS);
  },

  // What the host was doing is lost. It may have been paid for, so nothing is asked a second time.
  drop(port) {
    if (this.port !== port) return;
    clearTimeout(this.watch);
    this.port = null;
    for (const id of [...this.pending.keys()]) this.settle(id, UNREACHABLE);
  },

  settle(id, answer) {
    const resolve = this.pending.get(id);
    if (!resolve) return;
    this.pending.delete(id);
    const { id: _, ...rest } = answer;
    resolve(rest);
  },

  async greet(port) {
    try {
      const answer = await this.send(port, { kind: "hello", profile: await profile(), version: VERSION });
      if (answer.error) throw new Error(answer.message);
      await offerToPages(true);
    } catch (error) {
      this.notBefore = Date.now() + BACKOFF_MS;
      this.drop(port);
      port.disconnect();
      await offerToPages(false);
      throw error;
    }
  },

  send(port, message) {
    const id = ++this.last;
    const frame = { ...message, id };
    const fits = new TextEncoder().encode(JSON.stringify(frame)).length <= MAX_FRAME;
    if (this.port !== port || !fits) return Promise.resolve(UNREACHABLE);
    return new Promise((resolve) => {
      this.pending.set(id, resolve);
      if (this.pending.size === 1) this.listen();
      try {
        port.postMessage(frame);
      } catch {
        // Its host has ended, and the news of that is under way.
        this.settle(id, UNREACHABLE);
      }
    });
  },

  async ask(message, tab = null) {
    const others = this.asking.get(tab) ?? 0;
    if (others >= MAX_PENDING || (!this.port && Date.now() < this.notBefore)) return UNREACHABLE;
    this.asking.set(tab, others + 1);
    try {
      this.connect();
      const { port } = this;
      await this.greeted;
      return await this.send(port, message);
    } catch {
      return UNREACHABLE;
    } finally {
      const left = this.asking.get(tab) - 1;
      if (left) this.asking.set(tab, left);
      else this.asking.delete(tab);
    }
  },
};

// What is to be removed is asked for until it is, as long as this worker lives: the device may be busy, or starting.
async function insist(message, tab = null) {
  for (let wait = RETRY_MS; (await device.ask(message, tab)).error === UNREACHABLE.error; wait *= 2) {
    await new Promise((done) => setTimeout(done, wait));
  }
}

// The name of this browser profile's device. Out of reach of content scripts, so of renderers: it would tell all sites
// that they see the same person, and another name would be another device.
async function profile() {
  await chrome.storage.local.setAccessLevel({ accessLevel: "TRUSTED_CONTEXTS" });
  const kept = await chrome.storage.local.get("profile");
  if (kept.profile) return kept.profile;
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  const made = [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  await chrome.storage.local.set({ profile: made });
  return made;
}

// --- Pages have the API only while there is a device: without one they see a plain browser.
const EVERYWHERE = { matches: ["https://*/*"], allFrames: true, matchOriginAsFallback: true, runAt: "document_start", persistAcrossSessions: true };
const SCRIPTS = [
  { id: "page", js: ["services.js", "port.js", "attribution.js"], world: "MAIN", ...EVERYWHERE },
  { id: "content", js: ["content.js"], world: "ISOLATED", ...EVERYWHERE },
];
async function offerToPages(offered) {
  const registered = await chrome.scripting.getRegisteredContentScripts();
  if (offered && registered.length) await chrome.scripting.updateContentScripts(SCRIPTS);
  else if (offered) await chrome.scripting.registerContentScripts(SCRIPTS);
  else if (registered.length) await chrome.scripting.unregisterContentScripts();
}

// --- Who calls: a document and those that hold it, each under the origin that the browser has for it.
const spoken = new Map();
function speak(tabId, documentId, place) {
  const nonce = crypto.randomUUID();
  return new Promise((resolve, reject) => {
    const fail = () => { spoken.delete(nonce); clearTimeout(late); reject(new Error("silent")); };
    const late = setTimeout(fail, SPEAK_MS);
    spoken.set(nonce, { documentId, hear: (said) => { clearTimeout(late); resolve(said); } });
    chrome.tabs.sendMessage(tabId, { kind: "speak", nonce, place }, { documentId }).catch((error) => {
      // A document without our script. Any other error says only that no answer was sent, and none is.
      if (/Receiving end does not exist|No document/.test(error.message)) fail();
    });
  });
}
function hear(message, sender) {
  const asked = spoken.get(message.nonce);
  if (!asked || asked.documentId !== sender.documentId) return;
  spoken.delete(message.nonce);
  asked.hear({ origin: sender.origin, containers: message.containers, place: message.place });
}
// Innermost first: { origin, policy, containers }, where containers are what the holder says of the frame.
async function chainOf(tabId, documentId, origin, place) {
  const frame = await chrome.webNavigation.getFrame({ documentId });
  if (!frame || frame.documentLifecycle !== "active") throw new Error("not active");
  const chain = [{ origin, policy: await policyOf(documentId) }];
  let holder = frame.parentDocumentId;
  let wanted = place;
  while (holder) {
    const [said, next] = await Promise.all([speak(tabId, holder, wanted), chrome.webNavigation.getFrame({ documentId: holder })]);
    chain.at(-1).containers = said.containers;
    chain.push({ origin: said.origin, policy: await policyOf(holder) });
    holder = next.parentDocumentId;
    wanted = said.place;
  }
  return chain;
}

// --- Policies: the header of a document's own response, kept only where it names this API, until its tab is closed. A
// document that the browser keeps for going back has no frame meanwhile, and must still have its policy when it returns.
const OURS = /save-impression|measure-conversion/i;
const NOTHING_ALLOWED = "save-impression=(), measure-conversion=()";
const arriving = new Map();
const policies = new Map();
async function policyOf(documentId) {
  const kept = policies.get(documentId) ?? (await chrome.storage.session.get(documentId))[documentId];
  return kept?.policy ?? "";
}
async function keepPolicy(tab, documentId, policy) {
  // In memory at once, since the document may call in its first script; in the session for a worker that starts again,
  // as long as there is room.
  policies.set(documentId, { tab, policy });
  await chrome.storage.session.set({ [documentId]: { tab, policy } }).catch(() => {});
}
async function forgetPolicies(tab) {
  const kept = Object.entries({ ...(await chrome.storage.session.get(null)), ...Object.fromEntries(policies) });
  for (const [documentId, { tab: its }] of kept) {
    // A document that was prerendered for a tab of its own is listed under the one that began it.
    if (its !== tab || (await chrome.webNavigation.getFrame({ documentId }))?.documentLifecycle === "active") continue;
    policies.delete(documentId);
    await chrome.storage.session.remove(documentId);
  }
}
function headerOf(details, name) {
  const lines = (details.responseHeaders ?? []).filter((each) => each.name.toLowerCase() === name && each.value !== undefined);
  return lines.length ? lines.map((each) => each.value).join(", ") : null;
}
// A call may come before the news that its document was committed.
function policyOfEarlyCall({ tab, frameId, documentId, url }) {
  const arrived = arriving.get(`${tab.id} ${frameId}`);
  if (arrived?.url === url.split("#")[0]) keepPolicy(tab.id, documentId, arrived.policy);
}
function noteArrival({ tabId, frameId, url, ...details }) {
  const policy = headerOf(details, "permissions-policy") ?? "";
  const kept = policy.length > MAX_POLICY ? NOTHING_ALLOWED : policy;
  if (OURS.test(policy)) arriving.set(`${tabId} ${frameId}`, { url: url.split("#")[0], policy: kept });
  else arriving.delete(`${tabId} ${frameId}`);
}
// A response that becomes no document, as a download does not.
chrome.webNavigation.onErrorOccurred.addListener(({ tabId, frameId }) => arriving.delete(`${tabId} ${frameId}`));

// --- Responses: the standard's two headers and Clear-Site-Data, of what came over the network.
const CARRIERS = new Set(["image", "media", "other", "ping", "script", "xmlhttprequest"]);
function onResponse(details) {
  if (details.type === "main_frame" || details.type === "sub_frame") noteArrival(details);
  // A preflight carries the headers of what it asks for.
  if (details.fromCache || details.method === "OPTIONS") return;
  const header = headerOf(details, "clear-site-data");
  if (header !== null) insist({ kind: "clear", url: details.url, header }, details.tabId);
  // A 304 that the page's own cache asked for; one for the browser's cache shows as a hit, so neither counts.
  if (!CARRIERS.has(details.type) || !details.documentId || details.statusCode === 304) return;
  const save = headerOf(details, "save-impression");
  const measure = headerOf(details, "measure-conversion");
  if (save !== null || measure !== null) heed(details, save, measure).catch(() => { /* Its document is gone. */ });
}
async function heed(details, save, measure) {
  const { tabId, documentId, url } = details;
  const place = details.parentDocumentId ? (await speak(tabId, documentId, null)).place : null;
  const chain = await chainOf(tabId, documentId, details.initiator ?? "null", place);
  const answer = await device.ask({ kind: "response", tab: tabId, chain, url, save, measure }, tabId);
  if (!answer.report) return;
  await chrome.tabs.sendMessage(tabId, { kind: "deliver", url: answer.reportUrl, report: answer.report }, { documentId });
  countReport(tabId);
}
// Not onHeadersReceived, which fires for cache hits too and cannot tell them; extraHeaders for Clear-Site-Data.
for (const event of [chrome.webRequest.onResponseStarted, chrome.webRequest.onBeforeRedirect]) {
  event.addListener(onResponse, { urls: ["https://*/*"] }, ["responseHeaders", "extraHeaders"]);
}

// --- Navigations: another site in a tab needs an action of its own. An address that the person chose is one; scripts
// reload, and go back and forth, too.
const CHOSEN = new Set(["auto_bookmark", "generated", "keyword", "keyword_generated", "start_page", "typed"]);
chrome.webNavigation.onCommitted.addListener((details) => {
  const { tabId: tab, frameId, documentId, url } = details;
  const arrived = arriving.get(`${tab} ${frameId}`);
  arriving.delete(`${tab} ${frameId}`);
  if (arrived?.url === url.split("#")[0]) keepPolicy(tab, documentId, arrived.policy);
  if (frameId !== 0 || details.documentLifecycle !== "active") return;
  const chosen = CHOSEN.has(details.transitionType) && !details.transitionQualifiers.includes("forward_back");
  device.ask({ kind: "navigated", tab, url, chosen });
  resetBadge(tab, url);
});
chrome.tabs.onRemoved.addListener((tab) => {
  badges.delete(tab);
  forgetPolicies(tab);
  device.ask({ kind: "closed", tab });
});

// --- History that the person removes, or that the browser drops: the hosts of which no visit is left, and those near
// them that have some. The device knows which of them are one site.
chrome.history.onVisitRemoved.addListener(async ({ allHistory, urls }) => {
  if (allHistory) {
    insist({ kind: "forget" });
    return;
  }
  const hosts = new Set(urls.filter((url) => url.startsWith("https:")).map((url) => new URL(url).hostname));
  const end = (host) => host.split(".").slice(-2).join(".");
  const near = new Set([...hosts].map(end));
  const left = await Promise.all([...near].map((text) => chrome.history.search({ text, startTime: 0, maxResults: 1_000 })));
  // A search finds titles too, and hosts of other sites are nobody's business.
  const kept = new Set(left.flat().map((visit) => new URL(visit.url).hostname).filter((host) => near.has(end(host))));
  const gone = [...hosts].filter((host) => !kept.has(host));
  if (gone.length) insist({ kind: "forget", hosts: gone, kept: [...kept] });
});

// --- The badge: how many reports the site in a tab has got.
const badges = new Map();
function showBadge(tabId) {
  const { count } = badges.get(tabId);
  chrome.action.setBadgeText({ tabId, text: count ? String(Math.min(count, 99)) : "" }).catch(() => {});
}
function countReport(tabId) {
  const badge = badges.get(tabId) ?? { origin: null, count: 0 };
  badges.set(tabId, { ...badge, count: badge.count + 1 });
  showBadge(tabId);
}
function resetBadge(tabId, url) {
  const { origin } = new URL(url);
  const badge = badges.get(tabId);
  badges.set(tabId, { origin, count: badge?.origin === origin ? badge.count : 0 });
  showBadge(tabId);
}
// The leaf of the dashboard. The toolbar takes no SVG, and a picture file would be the one binary here.
function showLeaf() {
  const size = 32;
  const canvas = new OffscreenCanvas(size, size).getContext("2d");
  canvas.fillStyle = "#0b7a5b";
  for (const [x, y] of [[12, 7.5], [7, 15.5], [17, 15.5]]) {
    canvas.beginPath();
    canvas.arc((x * size) / 24, (y * size) / 24, (5 * size) / 24, 0, 2 * Math.PI);
    canvas.fill();
  }
  chrome.action.setIcon({ imageData: canvas.getImageData(0, 0, size, size) });
  chrome.action.setBadgeBackgroundColor({ color: "#0b6b50" });
}

// --- Messages. Calls and input come from content scripts; what is the person's only from the extension's own pages.
async function onCall(message, sender) {
  // A prerendered document has the tab of the page that started it, and would use that one's activation.
  if (!sender.tab || sender.documentLifecycle !== "active") return REFUSED;
  if (message.call !== "save" && message.call !== "measure") return REFUSED;
  const tab = sender.tab.id;
  policyOfEarlyCall(sender);
  let chain;
  try {
    chain = await chainOf(tab, sender.documentId, sender.origin, message.place);
  } catch {
    return REFUSED;
  }
  const answer = await device.ask({ kind: message.call, tab, chain, options: message.options, acted: message.acted === true }, tab);
  if (answer.report) countReport(tab);
  return answer;
}
const PERSONS = new Set(["overview", "switch", "page"]);
chrome.runtime.onMessage.addListener((message, sender, reply) => {
  if (sender.origin === location.origin) {
    if (!PERSONS.has(message.kind)) return false;
    device.notBefore = 0;
    device.ask(message).then(reply);
    return true;
  }
  if (message.kind === "call") {
    onCall(message, sender).then(reply, () => reply(UNREACHABLE));
    return true;
  }
  if (message.kind === "acted" && sender.tab && sender.documentLifecycle === "active") device.ask({ kind: "acted", tab: sender.tab.id }, sender.tab.id);
  if (message.kind === "spoken") hear(message, sender);
  return false;
});

chrome.runtime.onInstalled.addListener(({ reason }) => {
  if (reason === "install") chrome.tabs.create({ url: "welcome.html" });
});
// Without a listener the browser would not start this worker with itself.
chrome.runtime.onStartup.addListener(() => {});
showLeaf();
device.connect();
