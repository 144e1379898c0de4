// The serious rules of accessibility, as one expression that gives a list of findings. Run in the page by tests/browser.py.
() => {
  const findings = [];
  const all = (selector) => Array.from(document.querySelectorAll(selector));
  const shown = (element) => element.checkVisibility({ visibilityProperty: true });
  const name = (element) => element.outerHTML.slice(0, 100);
  const text = (id) => document.getElementById(id)?.textContent.trim() ?? "";
  const need = (condition, finding) => condition || findings.push(finding);

  // The document.
  need(document.documentElement.lang, "the page names no language");
  need(document.title.trim(), "the page has no title");
  need(all("main").length === 1, "the page needs exactly one main landmark");
  need(all("h1").filter(shown).length === 1, "the page needs exactly one first heading");
  const skip = document.querySelector("body > a");
  need(skip && document.querySelector(skip.getAttribute("href")), "the first link must skip to the content");

  // Headings go down one level at a time.
  let level = 0;
  for (const heading of all("h1, h2, h3, h4, h5, h6").filter(shown)) {
    const next = Number(heading.tagName[1]);
    need(next <= level + 1, `heading skips a level: ${name(heading)}`);
    level = next;
  }

  // Everything that can be used or looked at has a name.
  const label = (element) =>
    element.getAttribute("aria-label") ??
    (element.getAttribute("aria-labelledby") ?? "").split(" ").filter(Boolean).map(text).join(" ");
  for (const element of all("a, button, summary").filter(shown)) {
    need(element.textContent.trim() || label(element), `no name: ${name(element)}`);
  }
  for (const field of all("input:not([type=hidden]), select, textarea").filter(shown)) {
    need(field.labels.length || label(field), `no label: ${name(field)}`);
  }
  for (const image of all("img")) need(image.hasAttribute("alt"), `no alternative text: ${name(image)}`);
  for (const drawing of all("svg").filter(shown)) {
    need(drawing.getAttribute("aria-hidden") === "true" || label(drawing), `no name: ${name(drawing)}`);
  }
  for (const region of all("nav, section, aside, [role=group]").filter(shown)) {
    need(label(region) || region.id === "told", `landmark without a name: ${name(region)}`);
  }
  for (const table of all("table")) {
    need(table.caption?.textContent.trim(), `table without a caption: ${name(table)}`);
    need(Array.from(table.querySelectorAll("th")).every((cell) => cell.scope), `header without a scope: ${name(table)}`);
  }

  // Identifiers are unique, and nothing changes the order of the keyboard.
  const identifiers = all("[id]").map((element) => element.id);
  need(new Set(identifiers).size === identifiers.length, "an id is used twice");
  for (const element of all("[tabindex]")) need(element.tabIndex <= 0, `order of focus is changed: ${name(element)}`);

  // Contrast of text: 4.5 to 1, or 3 to 1 for large text.
  const channels = (colour) => {
    const [red, green, blue, alpha = 1] = colour.match(/[\d.]+/g).map(Number);
    return { red, green, blue, alpha };
  };
  const linear = (value) => (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4);
  const luminance = ({ red, green, blue }) => 0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue);
  const background = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = channels(getComputedStyle(at).backgroundColor);
      if (colour.alpha === 1) return colour;
    }
    return { red: 255, green: 255, blue: 255 };
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.data.trim() || !shown(element) || element.closest("svg, :disabled, noscript")) continue;
    const style = getComputedStyle(element);
    const [dark, light] = [luminance(channels(style.color)), luminance(background(element))].sort((a, b) => a - b);
    const ratio = (light + 0.05) / (dark + 0.05);
    const size = parseFloat(style.fontSize);
    const least = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700) ? 3 : 4.5;
    need(ratio >= least, `contrast ${ratio.toFixed(2)} below ${least}: ${name(element)}`);
  }
  return findings;
}
