// The sliders: the page's own server draws what they would show, so that the drawing is in one place.
"use strict";

const sliders = document.querySelector("#outlook-form");
let wanted = 0;

async function draw() {
  const mine = ++wanted;
  const response = await fetch(`/outlook?${new URLSearchParams(new FormData(sliders))}`);
  if (!response.ok) return;
  const picture = await response.text();
  // A slower answer to an older place of the slider is not shown.
  if (mine === wanted) document.querySelector("#outlook-picture").outerHTML = picture;
}

sliders.addEventListener("input", draw);
sliders.addEventListener("submit", (event) => {
  event.preventDefault();
  draw();
});
