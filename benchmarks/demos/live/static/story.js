// The slider says where it stands. Let go of it and the helpers are asked; with the keyboard the button asks.
"use strict";

const form = document.querySelector("#ask");
const slider = document.querySelector("#position");
const shown = form.querySelector("output");
const sizes = slider.dataset.sizes.split(",").map(Number);
let pulled = false;

slider.addEventListener("pointerdown", () => { pulled = true; });
slider.addEventListener("keydown", () => { pulled = false; });
slider.addEventListener("input", () => {
  const people = sizes[Number(slider.value)];
  const text = people === 0 ? "You alone" : `${people.toLocaleString("en")} people`;
  shown.textContent = text;
  slider.setAttribute("aria-valuetext", text);
});
slider.addEventListener("change", () => {
  if (pulled) form.requestSubmit();
});
