// A click on an ad is an impression: the device remembers it, and the page learns nothing from that.
"use strict";

async function remember(ad) {
  await navigator.attribution.saveImpression({
    histogramIndex: Number(ad.dataset.campaign),
    conversionSites: [ad.dataset.shop],
    lifetimeDays: 30,
  });
  // What a tracker would be sent, for comparison; Trefoil has no use for it.
  await fetch("/tracker", { method: "POST", body: ad.dataset.campaign });
}

for (const ad of document.querySelectorAll("a.ad")) {
  ad.addEventListener("click", async (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    try {
      await remember(ad);
    } finally {
      location.href = ad.href;
    }
  });
}
