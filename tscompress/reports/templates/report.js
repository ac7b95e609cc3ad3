"use strict";
document.documentElement.classList.add("js");

for (const choice of document.querySelectorAll("[data-switch]")) {
  const figure = choice.closest("figure");
  choice.addEventListener("change", (event) => {
    const chosen = event.target.value;
    for (const view of figure.querySelectorAll("[data-view]")) {
      view.toggleAttribute("hidden", view.dataset.view !== chosen);
    }
    for (const cell of figure.querySelectorAll("[data-percents]")) {
      const percent = cell.dataset.percents.split(" ")[chosen];
      cell.textContent = percent;
      cell.style.setProperty("--share", percent + "%");
    }
  });
}

for (const choice of document.querySelectorAll("[data-models]")) {
  const figure = choice.closest("figure");
  choice.addEventListener("change", (event) => {
    figure.classList.toggle("without-" + event.target.value, !event.target.checked);
  });
}

const tip = document.getElementById("tip");
const showTip = (event) => {
  const target = event.target.closest ? event.target.closest("[data-tip]") : null;
  tip.hidden = !target;
  if (!target) return;
  tip.textContent = target.dataset.tip;
  const { offsetWidth: width, offsetHeight: height } = tip;
  const left = Math.min(event.clientX + 14, window.innerWidth - width - 8);
  const below = event.clientY + 16 + height < window.innerHeight;
  tip.style.left = Math.max(8, left) + "px";
  tip.style.top = Math.max(8, below ? event.clientY + 16 : event.clientY - height - 12) + "px";
};
document.addEventListener("pointermove", showTip);
document.addEventListener("pointerdown", showTip);
document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true, capture: true });
