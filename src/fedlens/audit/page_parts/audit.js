// Pointing at one picture of a row zooms all of them to the same place.
for (const trio of document.querySelectorAll(".trio")) {
  const look = (event) => {
    const pane = event.target.closest(".pane");
    if (!pane) return;
    const box = pane.getBoundingClientRect();
    const x = (100 * (event.clientX - box.left)) / box.width, y = (100 * (event.clientY - box.top)) / box.height;
    trio.style.setProperty("--at", `${x.toFixed(1)}% ${y.toFixed(1)}%`);
    trio.classList.add("zoomed");
  };
  trio.addEventListener("pointermove", look);
  trio.addEventListener("pointerdown", look);
  trio.addEventListener("pointerleave", () => trio.classList.remove("zoomed"));
  trio.addEventListener("keydown", (event) => { if (event.key === "Enter") trio.classList.toggle("zoomed"); });
}
