// A click on an ad is an impression: the device remembers it, and the page learns nothing from that.
"use strict";

async function remember(ad) {
  if (ad.dataset.form === "script") {
    await navigator.attribution.saveImpression({
      histogramIndex: Number(ad.dataset.campaign),
      conversionSites: [ad.dataset.shop],
      lifetimeDays: 30,
    });
  }
  // The publisher hears of the click too. Its answer may carry a Save-Impression header, which does the same.
  await fetch("/clicked", { method: "POST", body: ad.dataset.campaign });
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
