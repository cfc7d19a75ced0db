// The page is whole without this. It says when a run that calls itself running has not been heard of for long, which
// the page of a killed run cannot know, and it opens all details for printing.
(function () {
  function look() {
    document.querySelectorAll('.state[data-state="running"]').forEach(function (state) {
      var quiet = Date.now() / 1000 - Number(state.dataset.updated);
      if (quiet > Number(state.dataset.silence)) {
        var pill = state.querySelector(".pill");
        pill.textContent = "Silent";
        pill.className = "pill silent";
        state.querySelector(".words").textContent =
          "no record for " + Math.round(quiet / 60) + " minutes; it may have been killed";
      }
    });
  }
  look();
  setInterval(look, 15000);
  addEventListener("beforeprint", function () {
    document.querySelectorAll("details").forEach(function (part) { part.open = true; });
  });
})();
