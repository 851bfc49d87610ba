// Colours, and the slider of the answers. The page reads without any of them.
"use strict";

const root = document.documentElement;
const button = document.getElementById("theme");
const themes = ["auto", "light", "dark"];
button.addEventListener("click", () => {
  const next = themes[(themes.indexOf(root.dataset.theme || "auto") + 1) % themes.length];
  root.dataset.theme = next;
  button.querySelector("span").textContent = next;
  button.setAttribute("aria-label", next === "auto" ? "Colours: as the system has them" : `Colours: ${next}`);
});

const slider = document.getElementById("step");
slider?.addEventListener("input", () => {
  const step = Number(slider.dataset.steps.split(" ")[slider.value]);
  document.querySelector("output").textContent = step;
  for (const run of document.querySelectorAll(".run-answers")) {
    const [, ...later] = run.querySelectorAll(".answer");
    const shown = later.filter((answer) => Number(answer.dataset.step) <= step).pop() ?? later[0];
    later.forEach((answer) => (answer.hidden = answer !== shown));
  }
});
