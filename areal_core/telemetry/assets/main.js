startTheme();
startStaleness();
startCurves();
startTimeline();
startShares();
startSamples();
for (const section of document.querySelectorAll("section")) {
  const panels = section.querySelector(":scope > .panels");
  const others = section.querySelector("#timeline, #samples, table, pre");
  if (panels && !panels.children.length) {
    if (!others) panels.append(element("p", { class: "empty" }, "Nothing was recorded."));
    section.querySelector(":scope > .caption")?.remove();
  }
}
document.documentElement.dataset.ready = "true";
